"""What the tests stand on: stubs generated from proto/, and a control plane.

    pip install -r tests/python/requirements.txt
    cargo build
    pytest tests/python

By default a control plane and two simulated engines with their sidecars are
started from BERTH_BIN (target/debug/berth) and stopped at the end. With
--control-plane HOST:PORT or BERTH_CONTROL_PLANE the tests talk to one that
runs already, and start nothing.
"""

import contextlib
import importlib
import importlib.resources
import os
import pathlib
import random
import socket
import subprocess
import sys
import time
import types

import grpc
import pytest
from grpc_tools import protoc

ROOT = pathlib.Path(__file__).resolve().parents[2]
START_SECONDS = 60
STOP_SECONDS = 15


def pytest_addoption(parser):
    parser.addoption(
        "--control-plane",
        default=os.environ.get("BERTH_CONTROL_PLANE"),
        help="HOST:PORT of a running control plane; unset: start one",
    )


@pytest.fixture(scope="session")
def api(tmp_path_factory):
    """The generated modules, as api.sampling, api.sampling_grpc and so on."""
    out = tmp_path_factory.mktemp("stubs")
    protos = sorted((ROOT / "proto").glob("berth/v1/*.proto"))
    wellknown = importlib.resources.files("grpc_tools") / "_proto"
    code = protoc.main(
        [
            "protoc",
            f"--proto_path={ROOT / 'proto'}",
            f"--proto_path={wellknown}",
            f"--python_out={out}",
            f"--grpc_python_out={out}",
            *map(str, protos),
        ]
    )
    assert code == 0, "the protos do not compile"
    sys.path.insert(0, str(out))
    modules = {}
    for proto in protos:
        name = proto.stem
        modules[name] = importlib.import_module(f"berth.v1.{name}_pb2")
        modules[f"{name}_grpc"] = importlib.import_module(f"berth.v1.{name}_pb2_grpc")
    return types.SimpleNamespace(**modules)


class Died(Exception):
    """A process ended while it was waited for."""


class Processes:
    """Processes of this session, each stopped by its own pid."""

    def __init__(self, binary, logs):
        self.binary = binary
        self.logs = logs
        self.running = []

    def start(self, name, *args):
        log = self.logs / f"{name}.log"
        with open(log, "wb") as out:
            process = subprocess.Popen(
                [self.binary, *args],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        self.running.append((name, process, log))
        return process, log

    def start_listening(self, name, args_for):
        """Starts args_for(port) and waits until the port accepts connections.

        Another process may take the port between the choice and the start:
        then the next one is tried.
        """
        for attempt in range(5):
            port = free_port()
            process, log = self.start(f"{name}-{attempt}", *args_for(port))
            try:
                wait_for(lambda: accepts(port), f"{name} on port {port}", process, log)
                return port
            except Died:
                if "in use" not in log.read_text(errors="replace").lower():
                    raise
        raise AssertionError(f"{name}: no free port")

    def check(self):
        for name, process, log in self.running:
            if process.poll() is not None and "in use" not in tail(log).lower():
                raise AssertionError(
                    f"{name} ended with {process.returncode}:\n{tail(log)}"
                )

    def stop(self):
        # The newest first: sidecars take their leave before the rest goes.
        for _, process, _ in reversed(self.running):
            if process.poll() is None:
                process.terminate()
                try:
                    process.wait(STOP_SECONDS)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()


def free_port():
    """A port that nobody listens on, below the range that the kernel gives to
    outgoing connections."""
    for _ in range(100):
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe:
            with contextlib.suppress(OSError):
                probe.bind(("127.0.0.1", port))
                return port
    raise AssertionError("no free port")


def accepts(port):
    with contextlib.suppress(OSError):
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
        return True
    return False


def tail(log):
    return log.read_text(errors="replace")[-4000:]


def wait_for(condition, what, process=None, log=None):
    end = time.monotonic() + START_SECONDS
    while True:
        # The process first: another one may answer on the port of a dead one.
        if process is not None and process.poll() is not None:
            raise Died(f"{what}: ended with {process.returncode}:\n{tail(log)}")
        if condition():
            return
        if time.monotonic() > end:
            seen = tail(log) if log else ""
            raise AssertionError(f"{what}: not there after {START_SECONDS} s\n{seen}")
        time.sleep(0.05)


@pytest.fixture(scope="session")
def control_plane(request, tmp_path_factory):
    """HOST:PORT of a control plane."""
    given = request.config.getoption("--control-plane")
    if given:
        yield given.removeprefix("http://")
        return

    binary = os.environ.get("BERTH_BIN", str(ROOT / "target" / "debug" / "berth"))
    assert os.path.exists(binary), f"{binary} is missing: cargo build, or set BERTH_BIN"
    work = tmp_path_factory.mktemp("berth")
    processes = Processes(binary, work)
    try:
        port = processes.start_listening(
            "serve",
            lambda port: [
                "serve",
                "--listen",
                f"127.0.0.1:{port}",
                "--admin-listen",
                f"127.0.0.1:{free_port()}",
                "--data-dir",
                str(work / f"data-{port}"),
            ],
        )
        for replica in ("sim-0", "sim-1"):
            engine = processes.start_listening(
                f"engine-{replica}",
                lambda port: [
                    "sim-engine",
                    "--port",
                    str(port),
                    "--profile",
                    "instant",
                    "--model",
                    "sim-model",
                ],
            )
            processes.start(
                f"sidecar-{replica}",
                "sidecar",
                "--control-plane",
                f"http://127.0.0.1:{port}",
                "--engine-url",
                f"http://127.0.0.1:{engine}",
                "--replica-id",
                replica,
            )
        request.node.berth_processes = processes
        yield f"127.0.0.1:{port}"
        processes.check()
    finally:
        processes.stop()


@pytest.fixture(scope="session")
def channel(control_plane):
    with grpc.insecure_channel(control_plane) as channel:
        yield channel


@pytest.fixture(scope="session")
def sampling(api, channel):
    return api.sampling_grpc.SamplingServiceStub(channel)


@pytest.fixture(scope="session")
def replicas(request, api, channel):
    """The healthy replicas of one model: two where they were started here."""
    fleet = api.fleet_grpc.FleetServiceStub(channel)
    processes = getattr(request.node, "berth_processes", None)
    wanted = 2 if processes else 1
    found = []

    def healthy():
        if processes:
            processes.check()
        try:
            listed = fleet.ListReplicas(api.fleet.ListReplicasRequest(), timeout=5)
        except grpc.RpcError as error:
            if error.code() == grpc.StatusCode.UNAVAILABLE:
                return False
            raise
        found[:] = [
            r for r in listed.replicas if r.health == api.fleet.REPLICA_HEALTH_HEALTHY
        ]
        return len(found) >= wanted

    wait_for(healthy, f"{wanted} healthy replicas")
    return [r for r in found if r.model == found[0].model]
