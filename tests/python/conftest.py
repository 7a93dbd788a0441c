"""What the tests stand on: stubs generated from proto/, and a control plane.

    pip install -r tests/python/requirements.txt
    cargo build
    pytest tests/python

By default control planes and simulated engines with their sidecars are started
from BERTH_BIN (target/debug/berth) and stopped at the end. With
--control-plane HOST:PORT or BERTH_CONTROL_PLANE the tests of a trainer talk to
one that runs already; those that need engines of their own are left out.
"""

import importlib
import importlib.resources
import os
import sys
import types

import grpc
import pytest
from cluster import ROOT, Cluster, healthy
from grpc_tools import protoc

# A step of 0.8 ms: long enough to be interrupted, short enough to wait for.
SESSION_ENGINES = ("--profile", "h100", "--time-scale", "0.1")
# The environment's proxies do not lead to this machine.
NO_PROXY = ("grpc.enable_http_proxy", 0)


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


@pytest.fixture(scope="session")
def binary(request):
    if request.config.getoption("--control-plane"):
        pytest.skip("needs a control plane of its own")
    binary = os.environ.get("BERTH_BIN", str(ROOT / "target" / "debug" / "berth"))
    assert os.path.exists(binary), f"{binary} is missing: cargo build, or set BERTH_BIN"
    return os.path.abspath(binary)


@pytest.fixture(scope="session")
def cluster(request, tmp_path_factory):
    """The cluster of the session; None where one runs already."""
    if request.config.getoption("--control-plane"):
        yield None
        return
    binary = request.getfixturevalue("binary")
    cluster = Cluster(
        binary, tmp_path_factory.mktemp("berth"), engine=SESSION_ENGINES
    )
    try:
        yield cluster
        cluster.check()
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def control_plane(request, cluster):
    """HOST:PORT of a control plane."""
    if cluster:
        return cluster.target
    return request.config.getoption("--control-plane").removeprefix("http://")


@pytest.fixture(scope="session")
def channel(control_plane):
    with grpc.insecure_channel(control_plane, options=[NO_PROXY]) as channel:
        yield channel


@pytest.fixture(scope="session")
def sampling(api, channel):
    return api.sampling_grpc.SamplingServiceStub(channel)


@pytest.fixture(scope="session")
def replicas(api, channel, cluster):
    """The healthy replicas of one model: two where they were started here."""
    if cluster:
        return healthy(api, channel, 2, cluster.check)
    return healthy(api, channel, 1)


@pytest.fixture
def start(binary, tmp_path):
    """Starts a cluster for this test alone."""
    started = []

    def start(**how):
        cluster = Cluster(binary, tmp_path, **how)
        started.append(cluster)
        return cluster

    yield start
    for cluster in started:
        cluster.stop()
