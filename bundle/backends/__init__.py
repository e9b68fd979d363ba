"""What differs by accelerator: `capabilities` as data (no torch), `runtime` where torch is needed."""
