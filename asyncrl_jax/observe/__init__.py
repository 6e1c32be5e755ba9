"""What a run shows and leaves behind: metrics, display, report, record and audit."""
