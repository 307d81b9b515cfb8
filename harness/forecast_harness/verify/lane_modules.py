"""Modules that lanes import once where verification and timing are what they do: judges and cells are forks of them."""

LANE_MODULES = (
    "torch",
    "triton",
    "forecast_harness.trials.variants.jobs",
    "forecast_harness.trials.judging.kernels.cell",
    "forecast_harness.trials.judging.kernels.race",
    "forecast_harness.verify.timing_job",
)
