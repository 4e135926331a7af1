"""What this machine is: device facts, memory, streams, graphs."""
