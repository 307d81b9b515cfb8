"""Ask whether a kernel is right: hidden sizes and values, in a sandbox, against a reference.

`forecast-autotune verify softmax FILE` does the same from a shell. Here the solutions are PyTorch; a file
with a Triton kernel is judged in the same way, on a CPU by Triton's interpreter.

Output (numbers may differ):

    stable: accepted after 72 launches
    naive: rejected
      wrong_values: output 0: 35 of 80 elements are wrong
"""

from forecast_harness.sandbox.api import SandboxLane
from forecast_harness.targets.packs import load_pack, make_solution
from forecast_harness.verify.run import verify

STABLE = """
import torch

def run(x):
    e = torch.exp(x - x.amax(-1, keepdim=True))
    return e / e.sum(-1, keepdim=True)
"""

# Right for values around zero, and what a quick test would accept.
NAIVE = """
import torch

def run(x):
    e = torch.exp(x)
    return e / e.sum(-1, keepdim=True)
"""


def main() -> None:
    """Judge both. Nothing of a solution runs in this process."""
    pack = load_pack("softmax")
    with SandboxLane() as lane:
        for name, source in (("stable", STABLE), ("naive", NAIVE)):
            verdict = verify(pack, make_solution(name, source), lane)
            launches = f" after {verdict.trials} launches" if verdict.accepted else ""
            print(f"{name}: {verdict.judgement}{launches}")
            for reason in verdict.reasons[:1]:
                print(f"  {reason.code}: {reason.detail.partition(';')[0]}")


if __name__ == "__main__":
    main()
