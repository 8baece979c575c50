"""Gives the wheel its tag: any Python, and Linux with glibc 2.28 or later on x86-64."""

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel


class KernelsWheel(bdist_wheel):
    """A wheel of libraries that no Python interpreter was linked to."""

    def finalize_options(self) -> None:
        """Place the files with those of the platform."""
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, its ABI and the platform."""
        return "py3", "none", "manylinux_2_28_x86_64"


setup(cmdclass={"bdist_wheel": KernelsWheel})
