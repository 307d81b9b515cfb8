"""The judge's own clock for host code on a device: many launches in each window, on memory that the judge owns."""
