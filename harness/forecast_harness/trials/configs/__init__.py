"""Which configs of a source are worth their time: what it lists, what is forecast, what is launched to verify it."""
