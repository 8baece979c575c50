"""Fixtures that all packages' tests share: a real Redis on a private socket, emptied for each test."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import ssl
import sys
import tempfile
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import redis as sync_redis
from fakes.cover import examples
from fakes.processes.child_process import ChildProcess
from fakes.processes.forked_process import ForkServer
from fakes.processes.forked_worker import fork_workers
from hypothesis import settings
from redis.asyncio import Redis
from xdist.scheduler import LoadFileScheduling  # type: ignore[import-untyped]

from penstock.gpu_node.model.checkpoint.conversion_cache import cache_folder
from penstock.queue.broker.connection import connect
from penstock.runtime.embedded_redis import EmbeddedRedis
from tests import kinds

# A shell that starts the suite in the background has it ignore SIGINT, which all that it starts would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Without bytecode files, each of the hundreds of processes that tests start would compile our modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Collection makes a million objects that stay. Looking for garbage among them took half of its time.
gc.disable()

# Triton reads it when it is first imported: without a GPU its interpreter runs the kernels.
HAS_GPU = Path("/dev/nvidiactl").exists()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

# As in the node's loading of a model: workers share their processors. OpenMP reads these when torch is first imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("GOMP_SPINCOUNT", "2000")
# So does the one of numpy, whose threads wait busily.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

SERVICES = pytest.StashKey[ForkServer]()
"""The server of services that xdist's workers share."""
MODELS = pytest.StashKey[Path]()
"""The folder of converted models that xdist's workers share."""
WEB = "tests/gateway/apis/web/"
DEMO_MODEL = "SmolLM2-*"
"""The demo model's conversions, which take seconds and stay in the user's cache folder. Those of other models go."""


# A machine with other work may hold up any example.
settings.register_profile("penstock", settings(deadline=None, max_examples=examples(100)))
settings.load_profile("penstock")


class FilesAndWeb(LoadFileScheduling):  # type: ignore[misc]
    """Gives workers whole files, whose tests share processes and models, and all files of the web page as one."""

    def _split_scope(self, nodeid: str) -> str:
        scope: str = super()._split_scope(nodeid)
        return WEB if scope.startswith(WEB) else scope


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--quick`, which `make quick` uses."""
    parser.addoption("--quick", action="store_true", help="run only tests that need neither processes, Redis nor torch")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Workers share a server of services. They are forks themselves, except where tests use a GPU: no fork can."""
    services = config.stash[SERVICES] = ForkServer("services")
    config.add_cleanup(services.close)
    models = ExitStack()
    config.stash[MODELS] = models.enter_context(own_models())
    config.add_cleanup(models.close)
    if not config.getoption("--quick"):
        services.open()
    if not HAS_GPU:
        tests = ForkServer("tests", *map(str, config.invocation_params.args))
        config.add_cleanup(tests.close)
        fork_workers(tests, specs)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Pass a worker the server's address and the models. Environment variables would reach runs that tests start."""
    node.workerinput["takes_files"] = node.config.getoption("dist") == "loadfile"
    node.workerinput["services"] = node.config.stash[SERVICES].address
    node.workerinput["models"] = str(node.config.stash[MODELS])


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Quick runs do not read files of which no test would run: importing torch alone takes seconds."""
    is_test = collection_path.name.startswith("test_") and collection_path.suffix == ".py"
    return True if config.getoption("--quick") and is_test and kinds.kinds_of_file(collection_path) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what each test needs, so that it can be chosen by that."""
    for item in items:
        kinds.mark(item)
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if not kinds.is_quick(item)])
        items[:] = [item for item in items if kinds.is_quick(item)]
    if getattr(config, "workerinput", {}).get("takes_files"):
        places = {file: place for place, file in enumerate(kinds.mixed([*dict.fromkeys(item.path for item in items)]))}
        items.sort(key=lambda item: places[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> LoadFileScheduling | None:
    """Give one worker all tests of the web page, which share a browser."""
    return FilesAndWeb(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Leave out of a report what is not shown of a step that passed. Workers send three reports of each test."""
    report = yield
    # Those of a teardown are shown of a test that has failed.
    if report.passed and not {"A", "P"} & set(item.config.option.reportchars):
        report.keywords = {}
        report.sections = [section for section in report.sections if section[0].endswith("teardown")]
    return report


def pytest_collection_finish() -> None:
    """What is loaded by now stays. The collector need not look at a million objects whenever a test calls it."""
    gc.freeze()
    # By default, each 700 new objects start a collection, and each 70,000 a full one.
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


@contextmanager
def own_models() -> Iterator[Path]:
    """Yield a folder for converted models, which has the demo model's conversions from the user's cache folder."""
    kept = cache_folder() / "models"
    kept.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="models") as folder:
        for conversion in kept.glob(DEMO_MODEL):
            (Path(folder) / conversion.name).symlink_to(conversion)
        yield Path(folder)
        for made in Path(folder).glob(DEMO_MODEL):
            # Another run may keep the same one at this moment.
            with suppress(OSError):
                if not made.is_symlink():
                    shutil.copytree(made, copy := kept / f".{made.name}-{os.getpid()}")
                    copy.rename(kept / made.name)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(request: pytest.FixtureRequest) -> Iterator[None]:
    """Delete what tests cache of their models after the session. Kernels and the demo model stay cached."""
    native = cache_folder() / "native"
    native.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        patched = stack.enter_context(pytest.MonkeyPatch.context())
        models = getattr(request.config, "workerinput", {}).get("models") or stack.enter_context(own_models())
        for name, target in (("native", native), ("models", models)):
            (folder / name).symlink_to(target)
        patched.setenv("PENSTOCK_CACHE", str(folder))
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_runtime_folder() -> Iterator[None]:
    """Use other folders, so that tests and this user's clients find neither each other's `penstock serve` nor queue."""
    with tempfile.TemporaryDirectory(prefix="run") as folder, pytest.MonkeyPatch.context() as patched:
        patched.setenv("PENSTOCK_RUNTIME_DIR", folder)
        patched.setenv("XDG_STATE_HOME", f"{folder}/state")
        yield


@pytest.fixture(scope="session", autouse=True)
def _fork_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Start the product's processes as forks of one that has imported it. The command itself has other tests."""
    worker = getattr(request.config, "workerinput", {"services": ""})
    server = ForkServer("services", address=worker["services"])
    if any(item.get_closest_marker("process") for item in request.session.items):
        server.open()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ChildProcess, "fork_server", server)
        yield
    server.close()


@pytest.fixture(scope="session", autouse=True)
def _one_tls_context() -> Iterator[None]:
    """Share a TLS context between HTTP clients of tests: each would read the certificates again, in 20 ms of CPU."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(ssl, "create_default_context", cache(ssl.create_default_context))
        yield


@pytest.fixture(scope="session")
def redis_server() -> Iterator[str]:
    """URL of a redis-server of this test session."""
    with EmbeddedRedis() as server:
        yield server.url


@pytest.fixture(scope="session")
def session_redis(redis_server: str) -> Iterator[sync_redis.Redis]:
    """A client of that server. To connect one for each test would take 2 ms of CPU time."""
    with sync_redis.Redis.from_url(redis_server) as client:
        yield client


def empty(client: Any) -> None:
    """Empty a server and give it its default configuration."""
    client.execute_command("FLUSHALL", "SYNC")  # Valkey frees memory later, unless it is told not to.
    client.config_set("maxmemory", "512mb")


@pytest.fixture
def redis_url(redis_server: str, session_redis: sync_redis.Redis) -> str:
    """URL of that server, emptied for each test."""
    empty(session_redis)
    return redis_server


@pytest.fixture(scope="module")
def redis_url_of_file(redis_server: str, session_redis: sync_redis.Redis) -> str:
    """URL of that server, emptied for each test file."""
    empty(session_redis)
    return redis_server


@pytest.fixture
async def redis(redis_url: str) -> AsyncIterator[Redis]:
    """An asyncio client of that server."""
    client = connect(redis_url)
    yield client
    await client.aclose()
