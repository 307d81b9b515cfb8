"""Levels of containment: system calls, files, devices and namespaces that a candidate does not get."""
