"""Operations with a dynamic size: one choice for the size's range, not for the size of the first call."""
