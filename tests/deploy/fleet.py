"""The commands of deploy/, run: a fleet as the units and the manifests start it, watched by
Prometheus as deploy/prometheus says, with the dashboard's expressions asked of it."""

import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.parse
from contextlib import contextmanager

import yaml
from common import DEPLOY, check, environment, eventually, free_port, get, have, run, seconds
from manifests import (
    KUBERNETES,
    SYSTEMD,
    containers,
    documents,
    env_file,
    exec_start,
    the,
    uncommented,
    unit,
    variables,
)
from metrics import panels, plain, rules, values

# What shows nothing in a fleet in which nothing is amiss, with no TLS and no collector.
EMPTY = {"Where pins fail", "Limits met", "Not OK, by reason"}


class Processes:
    """What is started here is ended here."""

    def __init__(self, temp):
        self.temp, self.all = temp, []

    def start(self, name, command, **options):
        log = open(self.temp / f"{name}.log", "w")
        options = {"env": environment(), "stderr": subprocess.STDOUT} | options
        command = [str(word) for word in command]
        self.all.append(subprocess.Popen(command, stdout=log, **options))
        return self.all[-1]

    def end(self):
        for one in reversed(self.all):
            if one.poll() is None:
                one.kill()
            one.wait()


@contextmanager
def processes(temp):
    mine = Processes(temp)
    try:
        yield mine
    except Exception:
        for log in sorted(temp.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-2000:]}")
        raise
    finally:
        mine.end()


def ends_well(process, name, limit):
    process.send_signal(signal.SIGTERM)
    check(process.wait(timeout=limit) == 0, f"{name} ended with {process.returncode}")


def certificate(temp):
    """A folder with a key and a certificate for the name that pods use, and for this machine."""
    folder = temp / "tls"
    folder.mkdir()
    (folder / "openssl.cnf").write_text(
        "[req]\ndistinguished_name = name\nx509_extensions = of_a_server\n[name]\n[of_a_server]\n"
        "basicConstraints = critical, CA:FALSE\n"
        "subjectAltName = DNS:berth.berth.svc, IP:127.0.0.1\n"
    )
    run(
        "openssl", "req", "-x509", "-config", folder / "openssl.cnf", "-newkey", "ec",
        "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", "/CN=berth", "-days", "1",
        "-keyout", folder / "tls.key", "-out", folder / "tls.crt",
    )  # fmt: skip
    return folder


def token(berth, folder, who, *role):
    """Makes a token, in a file of the name `who`, and adds its line to the credentials."""
    made = [berth, "token", "--principal", who, "--role", *role, "--out", folder / who]
    line = run(*made, stderr=None, env=environment())
    with open(folder / "credentials", "a", opener=lambda p, f: os.open(p, f, 0o600)) as file:
        file.write(line)


def check_configuration(berth, temp, tls):
    """berth.toml of the unit, with what it offers in comments."""
    token(berth, tls, "operator", "admin")
    text = uncommented((SYSTEMD / "berth.toml").read_text(), r"[a-z-]+ = ")
    check("tls-key" in text and "engine-networks" in text, "berth.toml offers no TLS")
    # The folder of the audit log must be there: systemd makes it.
    text = text.replace("/etc/berth/", f"{tls}/").replace("/var/log/berth/", f"{temp}/")
    (temp / "check.toml").write_text(text)
    run(berth, "serve", "--check-config", "--config", temp / "check.toml", env=environment())


def check_pods_with_tls(berth, temp, tls):
    """The control plane's pod and an engine's, with the components tls."""
    if not have("kubectl", "the components tls are not tried"):
        return
    folder = temp / "pods"
    folder.mkdir()
    token(berth, folder, "sidecars", "replica")
    grpc, admin, port = (free_port() for _ in range(3))
    toml = (KUBERNETES / "berth.toml").read_text()
    toml = toml.replace("0.0.0.0:7700", f"127.0.0.1:{grpc}")
    toml = toml.replace("0.0.0.0:7701", f"127.0.0.1:{admin}")
    toml = toml.replace("8000,30000", f"8000,{port}")
    for place in ("/etc/berth/credentials/", "/var/lib/berth/"):
        toml = toml.replace(place, f"{folder}/")
    (folder / "berth.toml").write_text(toml)
    plane = containers(the("StatefulSet", documents(KUBERNETES, temp / "plane-run")))["berth"]
    replaced = {"/etc/berth/config/": f"{folder}/", "/etc/berth/tls/": f"{tls}/"}
    engine = containers(the("Deployment", documents(KUBERNETES / "engine", temp / "engine-run")))
    with processes(folder) as started:
        started.start("plane", [berth, *here(plane["args"], replaced)],
                      env=environment(**dict_here(variables(plane), replaced)))  # fmt: skip
        eventually("the pod is ready", lambda: get(f"http://127.0.0.1:{admin}/readyz"))
        started.start("engine", [berth, "sim-engine", "--port", port])
        command, settings, _ = pod(engine, berth, folder, grpc, folder / "sidecars", port, tls)
        check(settings["BERTH_SIDECAR_CONTROL_PLANE"].startswith("https:"), "the sidecar has no TLS")
        sidecar = started.start("sidecar", command, env=environment(**settings))
        registered = (folder / "sidecar.log").read_text
        eventually("the sidecar has registered", lambda: '"registered"' in registered())
        ends_well(sidecar, "the pod's sidecar", 70)
        ends_well(started.all[0], "the pod's control plane", 60)
    print("pods: run with TLS")


def check_fleet(berth, temp):
    with processes(temp) as started:
        fleet(berth, temp, started)


def fleet(berth, temp, started):
    etc, logs = temp / "etc", temp / "var-log"
    etc.mkdir(), logs.mkdir()
    token(berth, etc, "trainer", "sample,admin", "--tenant", "a")
    token(berth, etc, "sidecars", "replica")
    token(berth, etc, "prometheus", "admin")
    grpc, admin, one, two = (free_port() for _ in range(4))

    # The control plane, by its unit.
    toml = (SYSTEMD / "berth.toml").read_text()
    toml = toml.replace("0.0.0.0:7700", f"127.0.0.1:{grpc}")
    toml = toml.replace("0.0.0.0:7701", f"127.0.0.1:{admin}")
    toml = toml.replace("/etc/berth/", f"{etc}/").replace("/var/log/berth/", f"{logs}/")
    (etc / "berth.toml").write_text(toml)
    folders = {"CONFIGURATION_DIRECTORY": etc, "STATE_DIRECTORY": temp / "state"}
    command = exec_start("berth.service", folders)
    check(command[0] == "/usr/local/bin/berth", "berth.service runs another binary")
    plane = started.start("plane", [berth, *command[1:]])
    eventually("the control plane is ready", lambda: get(f"http://127.0.0.1:{admin}/readyz"))
    check((temp / "state/store").stat().st_mode & 0o777 == 0o700, "the store is open to others")

    # Two engines, whose sidecars start as the unit and the pod say.
    for port in (one, two):
        flags = ["--time-scale", "0.05", "--incremental-streaming-output"]
        started.start(f"engine-{port}", [berth, "sim-engine", "--port", port, *flags])
    url = f"http://127.0.0.1:{grpc}"
    file = uncommented((SYSTEMD / "sidecar.env").read_text(), "BERTH_TLS")
    check("BERTH_TLS_CA" in env_file(file), "sidecar.env offers no authority")
    settings = env_file((SYSTEMD / "sidecar.env").read_text()) | {
        "BERTH_SIDECAR_CONTROL_PLANE": url,
        "BERTH_TOKEN_FILE": str(etc / "sidecars"),
        "BERTH_SIDECAR_ENGINE_URL": f"http://127.0.0.1:{one}",
        "BERTH_SIDECAR_REPLICA_ID": "unit",
    }
    known = run(berth, "sidecar", "--help", env=environment())
    for name in [*env_file(file), *settings]:
        check(f"[env: {name}=]" in known, f"the sidecar knows no {name}")
    command = exec_start("berth-sidecar@.service", {})
    of_unit = started.start("sidecar-unit", [berth, *command[1:]], env=environment(**settings))
    engine = containers(the("Deployment", documents(KUBERNETES / "engine")))
    command, settings, wait = pod(engine, berth, temp, grpc, etc / "sidecars", two)
    of_pod = started.start("sidecar-pod", command, env=environment(**settings))

    def metrics():
        token = (etc / "prometheus").read_text().strip()
        return get(f"http://127.0.0.1:{admin}/metrics", token)

    eventually("both replicas are there", lambda: 'berth_replicas{state="healthy"} 2' in metrics())
    watched = prometheus(temp, started, etc / "prometheus", admin)
    def bench(out, tokens):
        return [
            berth, "bench", "affinity", "--control-plane", url, "--token-file", etc / "trainer",
            "--replicas", "2", "--trajectories", "4", "--turns", "6", "--initial-prompt-tokens",
            "1024", "--output-tokens", tokens, "--time-scale", "0.05", "--out", temp / out,
        ]  # fmt: skip

    run(*bench("bench", 64), env=environment())
    page = metrics()
    for rule in rules():
        values(rule["expr"], page)
    for _, expression, _ in panels():
        values(expression, page)
    if watched:
        ask(watched)

    # The pod ends while it has turns: no turn fails, and its engine waits until the sidecar has
    # deregistered.
    turns = started.start("bench", bench("ending", 512))
    of_rank = re.compile(r'^berth_rank_in_flight_samples\{[^}]*replica="pod"[^}]*\} [1-9]', re.M)
    eventually("the pod has a turn", lambda: of_rank.search(metrics()))
    waiting = started.start("engine-stop", wait)
    time.sleep(0.3)
    check(waiting.poll() is None, "the engine did not wait for its sidecar")
    of_pod.send_signal(signal.SIGTERM)
    check(waiting.wait(timeout=70) == 0, "the engine waited in vain")
    told = (temp / "plane.log").read_text()
    check("it deregistered" in told, "the engine may end before its sidecar has deregistered")
    check(of_pod.wait(timeout=5) == 0, "the pod's sidecar failed")
    check(turns.wait(timeout=60) == 0, "a turn failed while the pod ended")
    limit = seconds(unit("berth-sidecar@.service")["TimeoutStopSec"][0])
    ends_well(of_unit, "the unit's sidecar", limit)
    reload(plane, logs)
    ends_well(plane, "the control plane", seconds(unit("berth.service")["TimeoutStopSec"][0]))
    print("fleet: run as the units and the pods say; drained; ended")


def here(words, replaced):
    """Words of a manifest, with addresses and paths of this machine."""
    done = []
    for word in words:
        for one, other in replaced.items():
            word = word.replace(one, str(other))
        check("$(" not in word, word)
        done.append(word)
    return done


def dict_here(settings, replaced):
    return dict(zip(settings, here(settings.values(), replaced)))


def pod(both, berth, folder, grpc, token, port, tls=None):
    """What the sidecar's container runs, with which variables, and what the engine's runs before
    it ends."""
    replaced = {
        "/run/berth": folder,
        "berth.berth.svc:7700": f"127.0.0.1:{grpc}",
        "/etc/berth/token": token,
        "/etc/berth-ca/ca.crt": tls and tls / "tls.crt",
        "http://127.0.0.1:30000": f"http://127.0.0.1:{port}",
        "http://$(POD_IP):30000": f"http://127.0.0.1:{port}",
        "$(POD_NAME)": "pod",
    }
    command = here(both["berth"]["command"] + both["berth"]["args"], replaced)
    command = [berth if word == "berth" else word for word in command]
    stop = both["engine"]["lifecycle"]["preStop"]["exec"]["command"]
    return command, dict_here(variables(both["berth"]), replaced), here(stop, replaced)


def reload(plane, logs):
    """ExecReload's signal opens the audit log again."""
    (line,) = unit("berth.service")["ExecReload"]
    check(line == '/bin/sh -c "kill -HUP $MAINPID"', f"ExecReload: {line}")
    os.rename(logs / "audit.jsonl", logs / "audit.1")
    plane.send_signal(signal.SIGHUP)
    eventually("the audit log is opened again", (logs / "audit.jsonl").exists)


def prometheus(temp, started, token, admin):
    """Starts Prometheus with the rules and the scrape of deploy/, every second."""
    if not have("prometheus", "the dashboard's expressions are parsed, but asked of nobody"):
        return None
    folder = temp / "prometheus"
    shutil.copytree(DEPLOY / "prometheus", folder)
    shutil.copy(token, folder / "berth.token")
    config = yaml.safe_load((folder / "prometheus.yml").read_text())
    config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    (scrape,) = config["scrape_configs"]
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{admin}"]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(config))
    run("promtool", "check", "config", folder / "prometheus.yml")
    port = free_port()
    started.start(
        "prometheus",
        [
            "prometheus", f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address=127.0.0.1:{port}",
        ],
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}/api/v1"
    eventually("Prometheus scrapes", lambda: query(url, 'up{job="berth"} == 1'))
    return url


def query(url, expression):
    asked = urllib.parse.urlencode({"query": expression})
    return json.loads(get(f"{url}/query?{asked}"))["data"]["result"]


def ask(url):
    """Each panel shows something, and each rule can be evaluated."""
    # Two scrapes after the last call.
    eventually("the turns are counted", lambda: query(url, "rate(berth_samples_total[1m]) > 0"))
    empty = set()
    for title, expression, _ in panels():
        try:
            eventually(title, lambda: query(url, plain(expression)), 0 if title in EMPTY else 5)
        except Exception:
            if title not in EMPTY:
                empty.add(f"{title}: {expression}")
    check(not empty, f"panels that show nothing: {empty}")

    def evaluated():
        groups = json.loads(get(f"{url}/rules"))["data"]["groups"]
        told = [rule for group in groups for rule in group["rules"]]
        return len(told) == len(rules()) and all(rule["health"] == "ok" for rule in told) and told

    told = eventually("the rules are evaluated", evaluated)
    firing = {rule["name"] for rule in told if rule["state"] == "firing"}
    check(not firing, f"alerts of a fleet that is well: {firing}")
    print(f"Prometheus: {len(told)} rules evaluated, none fires; each panel has its series")
