"""Checks report.json of `berth bench affinity` against a real engine, turn by
turn, and prints what was measured.

    check_report.py REPORT EXPECTED_RANKS
"""

import json
import sys


def warm_turn_faults(arm, page):
    """Every warm turn's cached tokens are prompt - 1, down to a whole page."""
    trajectories = arm["trajectories"]
    for turn in arm["turns"][1:]:
        # All trajectories of an arm have the same lengths, and none can have more
        # than this cached: the sum over them is as strict as each of them.
        prompt = turn["prompt_tokens"] // trajectories
        best = (prompt - 1) // page * page
        if turn["cache_hit_tokens"] != best * trajectories:
            yield (
                f"turn {turn['turn']}: {turn['cache_hit_tokens']} tokens cached over "
                f"{trajectories} trajectories, each should have {best} of {prompt}"
            )


def faults(report, ranks):
    page = report["fleet"]["page_size"]
    workload = report["workload"]
    arm = report["arms"]["affinity"]
    if workload["new_tokens_per_turn"] != 0 or not workload["ignore_eos"]:
        yield "prompt - 1 holds for prompts that are the turn before and nothing else"
    if arm["trajectories"] != workload["trajectories"]:
        yield f"{arm['trajectories']} trajectories were measured"
    if report["fleet"]["ranks"] != ranks:
        yield f"{report['fleet']['ranks']} ranks, not {ranks}"
    if arm["turns"][0]["cache_hit_tokens"] != 0:
        yield "a first turn found something in a cache: the prompts are not new"
    yield from warm_turn_faults(arm, page)
    if arm["full_hit_turns"] != arm["measured_turns"]:
        yield f"{arm['full_hit_turns']} full hits in {arm['measured_turns']} warm turns"
    for number, trajectory in enumerate(arm["placement"]["trajectories"], 1):
        places = {(p["replica"], p["rank"]) for p in trajectory["turns"]}
        if len(places) != 1:
            yield f"trajectory {number} was served on {sorted(places)}"
    used = arm["placement"]["distinct_ranks"]
    if used != min(ranks, arm["trajectories"]):
        yield f"the affinity arm used {used} ranks of {ranks}"
    for name, either in report["arms"].items():
        if either["wrong_rank_requests"] != 0:
            yield f"{name}: {either['wrong_rank_requests']} on another rank than asked"
        if either["retries"] != 0:
            yield f"{name}: {either['retries']} retries"


def describe(name, arm):
    cached = " ".join(
        f"{t['cache_hit_tokens']}/{t['prompt_tokens']}" for t in arm["turns"]
    )
    latency = " ".join(f"{t['mean_request_latency_ms']:.0f}" for t in arm["turns"])
    places = ", ".join(
        f"{p['replica']}:{p['rank']} {p['turns']}" for p in arm["placement"]["counts"]
    )
    print(f"{name}")
    print(f"  cached/prompt tokens by turn, all trajectories: {cached}")
    print(
        f"  reusable-prefix hit rate {arm['reusable_prefix_hit_rate']:.1%}, "
        f"overall {arm['overall_input_cache_hit_rate']:.1%}, "
        f"full hits {arm['full_hit_turns']}/{arm['measured_turns']}"
    )
    print(
        f"  mean latency by turn, ms: {latency} (warm turns "
        f"{arm['mean_warm_turn_latency_ms']:.0f}, p50 {arm['p50_request_latency_ms']:.0f})"
    )
    print(f"  turns by rank: {places}")


def main(path, ranks):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    for name, arm in report["arms"].items():
        describe(name, arm)
    for note in report["notes"]:
        print(f"note: {note}")
    found = list(faults(report, ranks))
    for fault in found:
        print(f"FAULT: {fault}")
    with_it, without = report["arms"]["affinity"], report["arms"]["no_affinity"]
    print(
        f"{'FAILED' if found else 'ok'}: {report['replicas']} servers, {ranks} ranks, "
        f"{with_it['full_hit_turns']} of {with_it['measured_turns']} warm turns cached "
        f"all that they could with affinity, {without['full_hit_turns']} of "
        f"{without['measured_turns']} without; hit rate "
        f"{with_it['reusable_prefix_hit_rate']:.1%} against "
        f"{without['reusable_prefix_hit_rate']:.1%}; warm turn "
        f"{with_it['mean_warm_turn_latency_ms']:.0f} ms against "
        f"{without['mean_warm_turn_latency_ms']:.0f} ms"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], int(sys.argv[2])))
