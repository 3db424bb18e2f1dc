"""The cost model: seconds and bytes of every choice a plan can make."""
