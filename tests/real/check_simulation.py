"""Simulates the workload of a report of `berth bench affinity` against a real
engine, with that engine's page size and KV capacity, and compares the cached tokens
turn by turn.

    check_simulation.py BERTH REPORT KV_TOKENS_PER_RANK
"""

import json
import subprocess
import sys

# The report's arms, and the policies of the simulator that route as they do.
ARMS = {"affinity": "affinity", "no_affinity": "round_robin"}


def trace(workload):
    """Sessions as the simulator reads them: each prompt is the whole history."""
    new, output = workload["new_tokens_per_turn"], workload["output_tokens"]
    for session in range(workload["trajectories"]):
        prompt, reuse = workload["initial_prompt_tokens"], 0
        for _ in range(workload["turns"]):
            yield f"{session} {prompt} {output} {reuse} 0"
            reuse = prompt + output
            prompt = reuse + new


def main(berth, path, kv_tokens):
    with open(path, encoding="utf-8") as file:
        report = json.load(file)
    fleet = report["fleet"]
    if report["workload"]["concurrency"] != 1:
        sys.exit("FAULT: turns that run beside each other have no order to compare")
    command = [berth, "simulate", "--trace", "-", "--json", "--live", "1"]
    command += ["--replicas", str(report["replicas"])]
    command += ["--ranks", str(fleet["ranks"] // report["replicas"])]
    command += ["--page-size", str(fleet["page_size"]), "--kv-tokens", kv_tokens]
    command += ["--policies", ",".join(ARMS.values())]
    lines = "\n".join(trace(report["workload"])) + "\n"
    ran = subprocess.run(command, input=lines, stdout=subprocess.PIPE, text=True, check=True)
    simulated = {policy["policy"]: policy for policy in json.loads(ran.stdout)["policies"]}
    differs = False
    for arm, policy in ARMS.items():
        real = [(t["prompt_tokens"], t["cache_hit_tokens"]) for t in report["arms"][arm]["turns"]]
        model = [(t["prompt_tokens"], t["cached_tokens"]) for t in simulated[policy]["turns"]]
        verdict = "equal" if real == model else "FAULT: they differ"
        print(f"{arm}: cached/prompt tokens by turn, all trajectories: {verdict}")
        for who, turns in (("engine", real), ("simulator", model)):
            print(f"  {who:<9}", " ".join(f"{cached}/{prompt}" for prompt, cached in turns))
        differs |= real != model
    return 1 if differs else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
