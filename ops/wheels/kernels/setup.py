"""Gives the wheel its tag: any Python, and Linux with glibc 2.28 or later on x86-64."""

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel


class Compiled(Distribution):
    """A distribution whose files are for one platform."""

    def has_ext_modules(self) -> bool:
        """Return True, although setuptools compiles nothing: the libraries are there."""
        return True


class KernelsWheel(bdist_wheel):
    """A wheel of libraries that no Python interpreter was linked to."""

    def get_tag(self) -> tuple[str, str, str]:
        """Return the tags of Python, its ABI and the platform."""
        return "py3", "none", "manylinux_2_28_x86_64"


setup(distclass=Compiled, cmdclass={"bdist_wheel": KernelsWheel})
