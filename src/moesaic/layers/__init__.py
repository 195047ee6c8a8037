"""Linear, norm, rotary embedding and attention, over the kernels."""
