import torch


def make_match_reference(reference, rtol, atol):
    def check(data, output):
        expected = reference(data)
        if output.shape != expected.shape:
            return False, f"shape {tuple(output.shape)} instead of {tuple(expected.shape)}"
        close = torch.isclose(output, expected, rtol=rtol, atol=atol)
        return bool(close.all()), f"{int((~close).sum())} elements differ"

    return check
