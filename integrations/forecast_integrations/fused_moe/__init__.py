"""The MoE kernel of vLLM and SGLang, tuned for the layers that are served. See `tuning.tune_moe`."""
