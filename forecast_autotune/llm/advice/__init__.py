"""Advice: a closed-form cost function of one kernel source, written once by a language model; never run as Python."""
