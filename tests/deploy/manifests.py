"""Units of systemd, manifests of Kubernetes and the Dockerfile, as far as nobody runs them."""

import re
import shlex
import shutil
import tomllib
from pathlib import Path

import yaml
from common import DEPLOY, ROOT, check, environment, have, run, seconds

SYSTEMD = DEPLOY / "systemd"
KUBERNETES = DEPLOY / "kubernetes"
# After the drain: what has no caller is stopped (3 s), and the store is closed.
AFTER_DRAIN = 10
# The oldest Kubernetes with sidecars that need no feature gate, and one that is new.
VERSIONS = ("1.29", "1.36")


def unit(name):
    """The settings of a unit; those that are given twice as a list."""
    settings = {}
    for line in (SYSTEMD / name).read_text().splitlines():
        if line and line[0] not in "#[;":
            key, value = line.split("=", 1)
            settings.setdefault(key, []).append(value)
    return settings


def exec_start(name, folders):
    """The command of a unit, with `folders` for systemd's variables."""
    (line,) = unit(name)["ExecStart"]
    for variable, folder in folders.items():
        line = line.replace("${" + variable + "}", str(folder))
    check("$" not in line and "%" not in line, f"{name}: {line}")
    return shlex.split(line)


def env_file(text):
    lines = (line for line in text.splitlines() if line and not line.startswith("#"))
    return dict(line.split("=", 1) for line in lines)


def uncommented(text, pattern):
    """A file with the options that it offers in comments."""
    return re.sub(rf"^# ({pattern})", r"\1", text, flags=re.M)


def check_units(berth, temp):
    toml = tomllib.loads((SYSTEMD / "berth.toml").read_text())
    service, sidecar = unit("berth.service"), unit("berth-sidecar@.service")
    stop = seconds(service["TimeoutStopSec"][0])
    check(stop >= seconds(toml["drain-timeout"]) + AFTER_DRAIN, "berth.service stops too soon")
    drain = env_file((SYSTEMD / "sidecar.env").read_text())["BERTH_SIDECAR_DRAIN_TIMEOUT"]
    stop = seconds(sidecar["TimeoutStopSec"][0])
    check(stop >= seconds(drain) + AFTER_DRAIN, "berth-sidecar@.service stops too soon")
    said = run(berth, "serve", "--check-config", env=environment())
    connections = int(re.search(r"^max-connections = (\d+)$", said, re.M).group(1))
    check(int(service["LimitNOFILE"][0]) > connections + 1024, "berth.service: LimitNOFILE")
    if not have("systemd-analyze", "Debian's package systemd"):
        return
    # A root of its own, in which the binary is where the units say.
    root = temp / "root"
    for folder in ("etc/systemd/system", "usr/local/bin", "usr/bin", "usr/lib/systemd"):
        (root / folder).mkdir(parents=True)
    (root / "bin").symlink_to("usr/bin")
    (root / "lib").symlink_to("usr/lib")
    places = map(Path, ("/usr/lib/systemd/system", "/lib/systemd/system"))
    system = next(place for place in places if place.is_dir())
    shutil.copytree(system, root / "usr/lib/systemd/system", symlinks=True)
    for binary in ("usr/local/bin/berth", "usr/bin/sh"):
        (root / binary).write_text("#!/bin/sh\n")
        (root / binary).chmod(0o755)
    for name in ("berth.service", "berth-sidecar@.service"):
        shutil.copy(SYSTEMD / name, root / "etc/systemd/system")
        said = run("systemd-analyze", "verify", "--man=no", f"--root={root}", name.replace("@", "@0"))
        mine = [line for line in said.splitlines() if "berth" in line]
        check(not mine, f"{name}: {mine}")
    print("units: verified by systemd-analyze")


def documents(folder, temp=None):
    """What `kubectl apply -k` would send, or, without kubectl, the files as they are. With
    `temp`, a new folder: what it would send with the components that are offered in comments."""
    if not have("kubectl", "kustomization.yaml files are read, not built"):
        kustomization = yaml.safe_load((folder / "kustomization.yaml").read_text())
        files = [folder / name for name in kustomization["resources"]]
        return [d for file in files for d in yaml.safe_load_all(file.read_text())]
    if temp:
        folder = shutil.copytree(folder, temp)
        file = folder / "kustomization.yaml"
        text = uncommented(file.read_text(), "components:")
        check("\ncomponents:" in text, f"{file} offers no component")
        file.write_text(text)
    return list(yaml.safe_load_all(run("kubectl", "kustomize", folder)))


def the(kind, documents):
    (found,) = [d for d in documents if d["kind"] == kind]
    return found


def containers(document):
    spec = document["spec"]["template"]["spec"]
    return {c["name"]: c for c in spec.get("initContainers", []) + spec["containers"]}


def variables(container):
    return {one["name"]: one["value"] for one in container.get("env", []) if "value" in one}


def mounted(document, name, paths):
    """Each of the paths is in a folder that is mounted, from a volume that there is."""
    spec = document["spec"]["template"]["spec"]
    volumes = {v["name"] for v in spec.get("volumes", [])}
    volumes |= {v["metadata"]["name"] for v in document["spec"].get("volumeClaimTemplates", [])}
    mounts = {m["mountPath"]: m["name"] for m in containers(document)[name]["volumeMounts"]}
    check(set(mounts.values()) <= volumes, f"{name} mounts what there is not")
    for path in paths:
        check(any(path.startswith(f"{m}/") for m in mounts), f"{path} is not mounted")


def check_manifests(temp):
    import kubernetes_validate

    plane, engines = documents(KUBERNETES), documents(KUBERNETES / "engine")
    with_tls = documents(KUBERNETES, temp / "plane"), documents(KUBERNETES / "engine", temp / "engine")
    for version in VERSIONS:
        for document in [*plane, *engines, *with_tls[0], *with_tls[1]]:
            kubernetes_validate.validate(document, version, strict=True)
    used = {f.name for f in KUBERNETES.rglob("*.yaml")} | {"berth.toml"}
    named = {"kustomization.yaml", "berth.toml"}
    for folder in (KUBERNETES, KUBERNETES / "engine"):
        named |= set(yaml.safe_load((folder / "kustomization.yaml").read_text())["resources"])
    check(used == named, f"files that no kustomization names: {used ^ named}")

    stateful, deployment = the("StatefulSet", plane), the("Deployment", engines)
    toml = tomllib.loads((KUBERNETES / "berth.toml").read_text())
    pod, berth = stateful["spec"]["template"]["spec"], containers(stateful)["berth"]
    check(stateful["spec"]["replicas"] == 1, "the store is one process's")
    grace = pod["terminationGracePeriodSeconds"]
    check(grace >= seconds(toml["drain-timeout"]) + AFTER_DRAIN, "the pod's grace is too short")
    # Whatever is named is mounted; what is written is on the claim.
    paths = [value for value in toml.values() if str(value).startswith("/")]
    mounted(stateful, "berth", paths + [berth["args"][berth["args"].index("--config") + 1]])
    mounts = {m["mountPath"]: m["name"] for m in berth["volumeMounts"]}
    claims = {c["metadata"]["name"] for c in stateful["spec"]["volumeClaimTemplates"]}
    check(mounts[str(Path(toml["data-dir"]).parent)] in claims, "the store is on no claim")
    for document in (the("StatefulSet", with_tls[0]), the("Deployment", with_tls[1])):
        said = variables(containers(document)["berth"])
        mounted(document, "berth", [value for value in said.values() if value.startswith("/")])
    ports = {p["name"]: p["containerPort"] for p in berth["ports"]}
    for name, option in (("grpc", "listen"), ("admin", "admin-listen")):
        check(toml[option] == f"0.0.0.0:{ports[name]}", f"{option} is not the port {name}")
    # The ports of engines: of the option, of both policies and of the engine itself.
    allowed = set(map(int, toml["engine-ports"].split(",")))
    policy, guard = the("NetworkPolicy", plane), the("NetworkPolicy", engines)
    check({p["port"] for r in policy["spec"]["egress"] for p in r["ports"]} == allowed, "egress")
    serves = {p["port"] for r in guard["spec"]["ingress"] for p in r["ports"]}
    check(serves <= allowed, "the engines' policy opens another port")
    check({p["containerPort"] for p in containers(deployment)["engine"]["ports"]} == serves, "engine")

    both, pod = containers(deployment), deployment["spec"]["template"]["spec"]
    drain = next(a for a in both["berth"]["args"] if a.startswith("--drain-timeout="))
    drain = seconds(drain.split("=")[1])
    waits = both["engine"]["lifecycle"]["preStop"]["exec"]["command"]
    waits = int(waits[waits.index("--wait") + 1])
    check(drain < waits < pod["terminationGracePeriodSeconds"], "the engine ends before its sidecar")
    print(f"manifests: {len(plane + engines)} documents, valid for Kubernetes {', '.join(VERSIONS)}")


def check_dockerfile():
    """What the image's build reads is what .dockerignore lets through."""
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    lines = [line for line in lines if line and not line.startswith("#")]
    check(lines[0] == "*" and all(line[0] == "!" for line in lines[1:]), ".dockerignore")
    let = {line[1:] for line in lines[1:]}
    cargo = tomllib.loads((ROOT / "Cargo.toml").read_text())
    needed = {"Cargo.toml", "Cargo.lock", "build.rs", "proto", "src"}
    # Cargo reads no manifest whose benches are not there.
    needed |= {"benches"} if "bench" in cargo else set()
    check(let == needed, f".dockerignore lets through {let}, the build reads {needed}")
    check(all((ROOT / path).exists() for path in let), ".dockerignore names what is not there")
    text = (DEPLOY / "docker/Dockerfile").read_text()
    rust = re.search(r"^ARG BUILDER=\S*rust:([\d.]+)-", text, re.M).group(1)
    least = cargo["package"]["rust-version"]
    check(tuple(map(int, rust.split("."))) >= tuple(map(int, least.split("."))), f"Rust {rust}")
    build = re.search(r"^RUN (cargo build .*)$", text, re.M).group(1)
    check(build in (ROOT / ".ci/run").read_text(), f"CI does not run `{build}`")
    print("Dockerfile: builds as CI does, from what it needs")
