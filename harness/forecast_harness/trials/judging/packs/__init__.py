"""Solutions of a pack, judged: verification, races in sandboxes; CUDA C++ sources of a declared kernel, too."""
