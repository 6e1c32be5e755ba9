"""Start-up of all roles as processes of one machine."""
