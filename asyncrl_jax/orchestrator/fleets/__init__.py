"""Where actors run, behind one seam: `base.Fleet`. Local processes are in `local/fleet.py`, beside what starts them."""
