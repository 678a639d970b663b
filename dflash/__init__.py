"""dflash: train a block-diffusion drafter for a frozen target, and know that the run is healthy."""
