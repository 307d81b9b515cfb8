"""Verification: whether a solution computes its pack's definition, and by which checks.

`run.verify` asks a sandbox lane. The lane's judge (`verification_job`, `examiner`, `problem`, `tolerance`) draws
inputs, knows the reference and compares bytes; the candidate's cell (`launch_cell`) holds nothing of that. The
limits of this design:

- Values: everything. Outputs are bytes, compared in another process with a float64 reference on inputs
  drawn after the candidate's process began. A result that passes is right, whoever computed it.
- Times: a cell reports them, the judge's clock bounds them. On a busy machine a lie below the cost of asking
  (some 100 us a launch) stays unseen in one launch; it has to survive two contests with fresh seeds.
- Who computes (modes D44, D45): found by counting kernels, by silencing them, and by watching framework
  operations for one launch, all in the candidate's own process. A candidate written against this very
  harness can tell the watched launch from the others and behave for its length.
- Out-of-bounds reads that do not change a result, and races that need load: compute-sanitizer's work.
"""
