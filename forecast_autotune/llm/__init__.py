"""How to ask a language model how fast kernels run: bins, prompts, backends.

`import forecast_autotune.llm` loads no model library; a backend imports its own when it is opened.
"""
