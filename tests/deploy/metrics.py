"""Rules and dashboard: each metric, label and value that they name is one that Berth has."""

import json
import re

import yaml
from common import DEPLOY, ROOT, check, have, run

RULES = DEPLOY / "prometheus/berth.rules.yml"
RULE_TESTS = DEPLOY / "prometheus/berth.rules.test.yml"
DASHBOARD = DEPLOY / "grafana/berth.json"

# What Prometheus adds by itself.
ADDED = {"instance", "job", "le", "alertname", "alertstate"}
# Series of these labels come with the first call; their words are elsewhere.
CALLS = {"code", "reason", "method"}


def documented():
    """Each metric of docs/metrics.md with its type and its labels."""
    metrics = {}
    for line in (ROOT / "docs/metrics.md").read_text().splitlines():
        if line.startswith("| `berth_"):
            name, kind, labels = (c.strip().replace("`", "") for c in line.split("|")[1:4])
            metrics[name] = (kind, {x.strip() for x in labels.split(",")} - {""})
    check(len(metrics) > 50, "docs/metrics.md has no table that can be read")
    return metrics


def metric(name, metrics):
    """The documented metric behind the name of a series."""
    if name in metrics:
        check(metrics[name][0] != "histogram", f"{name} is a histogram: it has no such series")
        return name
    base = re.sub(r"_(bucket|sum|count)$", "", name)
    check(base in metrics and metrics[base][0] == "histogram", f"{name} is not in docs/metrics.md")
    return base


SELECTOR = re.compile(r"\b(berth_[a-z_]+)(?:\{([^}]*)\})?")
MATCHER = re.compile(r'([a-z_]+)(=~|!~|!=|=)"([^"]*)"')


def names(expression, metrics):
    """Checks an expression's names and returns the labels that its metrics have."""
    labels = set(ADDED)
    for name, matchers in SELECTOR.findall(expression):
        labels |= metrics[metric(name, metrics)][1]
        for label, _, _ in MATCHER.findall(matchers or ""):
            check(label in metrics[metric(name, metrics)][1] | ADDED, f"{name} has no label {label}")
    for group in re.findall(r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)", expression):
        for label in filter(None, map(str.strip, group.split(","))):
            check(label in labels, f"no metric has the label {label}: {expression}")
    return labels


def reasons():
    """The reasons of errors and their codes, of the table in sampling.proto."""
    proto = (ROOT / "proto/berth/v1/sampling.proto").read_text()
    rows = re.findall(r"^// \| ([A-Z_]+) +\| ([A-Z_]+) ", proto, re.M)
    check(len(rows) > 30, "sampling.proto has no table of reasons that can be read")
    return {"none"} | {row[0] for row in rows}, {"OK", "UNKNOWN"} | {row[1] for row in rows}


def values(expression, page):
    """Checks that the values that an expression names are ones that Berth tells."""
    known_reasons, known_codes = reasons()
    for name, matchers in SELECTOR.findall(expression):
        for label, how, value in MATCHER.findall(matchers or ""):
            if label in ADDED or "$" in value:
                continue
            of_calls = label in CALLS and name.startswith("berth_request")
            words = value.split("|") if "~" in how else [value]
            if of_calls and label == "reason":
                told = known_reasons
            elif of_calls and label == "code":
                told = known_codes
            else:
                series = rf'^{name}\{{(?:[^}}]*,)?{label}="([^"]*)"'
                told = set(re.findall(series, page, re.M))
            for word in words:
                pattern = re.compile(word if "~" in how else re.escape(word))
                found = any(pattern.fullmatch(one) for one in told)
                check(found, f"{name} has no {label}={word!r}, but {sorted(told)}")


def rules():
    return [r for g in yaml.safe_load(RULES.read_text())["groups"] for r in g["rules"]]


def panels():
    """Title, expression and legend of each target of the dashboard."""
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            yield panel["title"], target["expr"], target["legendFormat"]


def plain(expression):
    """An expression as Grafana would send it."""
    expression = expression.replace("$__rate_interval", "1m")
    expression = expression.replace("$instance", ".*").replace("$replica", ".*")
    check("$" not in expression, f"an unknown variable in {expression}")
    return expression


def check_rules():
    metrics = documented()
    told = set()
    for rule in rules():
        labels = names(rule["expr"], metrics)
        check(rule["labels"]["severity"] in {"critical", "warning", "info"}, rule["alert"])
        for text in rule["annotations"].values():
            for label in re.findall(r"\$labels\.([a-z_]+)", text):
                check(label in labels, f"{rule['alert']}: no label {label}")
            for name in re.findall(r"\bberth_[a-z_]+", text):
                metric(name, metrics)
            told |= set(re.findall(r"\bBerth[A-Z]\w+", text))
    alerts = [rule["alert"] for rule in rules()]
    check(len(alerts) == len(set(alerts)), "two alerts have one name")
    check(told <= set(alerts), f"annotations name no alert: {told - set(alerts)}")
    # The test of a fleet that is ill in every way lists each alert.
    tests = RULE_TESTS.read_text()
    for alert in alerts:
        check(f'{{alertname="{alert}"}}' in tests, f"{alert} fires in no test")
    if have("promtool", "Debian's package prometheus"):
        run("promtool", "check", "rules", RULES)
        run("promtool", "test", "rules", RULE_TESTS.name, cwd=RULE_TESTS.parent)
        print(f"rules: {len(alerts)} alerts, each fires in a test")


def check_dashboard(temp):
    metrics = documented()
    recorded = []
    for title, expression, legend in panels():
        labels = names(expression, metrics)
        for label in re.findall(r"\{\{([a-z_]+)\}\}", legend):
            check(label in labels, f"{title}: no label {label} in {legend}")
        recorded.append({"record": f"panel:{len(recorded)}", "expr": plain(expression)})
    for variable in json.loads(DASHBOARD.read_text())["templating"]["list"]:
        if variable["type"] == "query":
            names(variable["query"]["query"], metrics)
    if have("promtool", "Debian's package prometheus"):
        file = temp / "panels.yml"
        file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": recorded}]}))
        run("promtool", "check", "rules", file)
    check_schema()
    print(f"dashboard: {len(recorded)} expressions")


def check_schema():
    """Grafana's own model takes all of the dashboard and gives it back."""
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()
    model = Dashboard.from_json(json.loads(DASHBOARD.read_text()))
    back = json.loads(json.dumps(model, cls=JSONEncoder))

    def compare(one, other, path):
        if isinstance(one, dict):
            for key, value in one.items():
                if value not in (None, [], {}, False):
                    check(key in other, f"Grafana has no {path}.{key}")
                    compare(value, other[key], f"{path}.{key}")
        elif isinstance(one, list):
            check(isinstance(other, list) and len(one) == len(other), f"{path} is lost")
            for n, (a, b) in enumerate(zip(one, other)):
                compare(a, b, f"{path}[{n}]")
        else:
            check(one == other, f"{path}: {one!r} came back as {other!r}")

    compare(json.loads(DASHBOARD.read_text()), back, "dashboard")
