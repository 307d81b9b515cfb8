"""Training-kernel libraries: a row per program, strided pointers, column loops, constexpr switches."""
