"""Every hot operation: its definition, its candidates and how one is chosen."""
