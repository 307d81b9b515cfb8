# mode: honest
# title: folds weight and bias into one multiply-add
# backend: cpu
# pack: layer_norm
# language: torch
# expected: accepted
import torch


def run(x, weight, bias):
    variance, mean = torch.var_mean(x, -1, keepdim=True, correction=0)
    scale = torch.rsqrt(variance + 1e-5) * weight
    return torch.addcmul(bias.expand_as(x), x - mean, scale)
