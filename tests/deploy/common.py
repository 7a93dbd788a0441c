"""What the checks of deploy/ share."""

import os
import re
import shutil
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"


class Wrong(Exception):
    """A check has failed."""


def check(holds, what):
    if not holds:
        raise Wrong(what)


def have(tool, where):
    """Whether `tool` is installed; a check that is not made is told, loudly."""
    if shutil.which(tool):
        return True
    print(f"!!! SKIPPED: {tool} is not installed ({where})")
    return False


def run(*command, **options):
    """Runs a command to its end and returns what it said."""
    options = {"timeout": 60, "stderr": subprocess.STDOUT} | options
    done = subprocess.run(
        [str(word) for word in command], stdout=subprocess.PIPE, text=True, **options
    )
    line = " ".join(map(str, command))
    check(done.returncode == 0, f"{line}: status {done.returncode}\n{done.stdout}")
    return done.stdout


def environment(**more):
    """This one without variables of Berth's."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("BERTH_")}
    return kept | more


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def get(url, token=None):
    request = urllib.request.Request(url)
    if token:
        request.add_header("authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def eventually(what, holds, seconds=20):
    """Waits until `holds()` is true, and returns it."""
    end = time.monotonic() + seconds
    while True:
        try:
            found, last = holds(), None
        except OSError as error:
            found, last = None, error
        if found:
            return found
        check(time.monotonic() < end, f"{what}: not within {seconds} s ({last})")
        time.sleep(0.1)


def seconds(text):
    """Of `30s`, `5m` or `60`."""
    number, unit = re.fullmatch(r"(\d+)(s|m|h|)", str(text)).groups()
    return int(number) * {"": 1, "s": 1, "m": 60, "h": 3600}[unit]
