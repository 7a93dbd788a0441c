"""Checks deploy/: `check.py BINARY`. What it cannot check for want of a tool it says."""

import sys
import tempfile
from pathlib import Path

import fleet
import manifests
import metrics
from common import Wrong


def main():
    berth = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        temp = Path(folder)
        metrics.check_rules()
        metrics.check_dashboard(temp)
        manifests.check_units(berth, temp)
        manifests.check_manifests(temp)
        manifests.check_dockerfile()
        tls = fleet.certificate(temp)
        fleet.check_configuration(berth, temp, tls)
        fleet.check_fleet(berth, temp)
        fleet.check_pods_with_tls(berth, temp, tls)


if __name__ == "__main__":
    try:
        main()
    except Wrong as wrong:
        sys.exit(f"deploy: {wrong}")
