"""Measuring the machine: matrix products, copies and all-reduces, as training meets them."""
