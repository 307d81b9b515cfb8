"""Operator-library style: small device functions composed over 2-D tiles, custom combine functions, bf16."""
