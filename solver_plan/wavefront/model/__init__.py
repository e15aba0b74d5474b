"""The constraint programs: `capacity` where any free devices will do, `devices` where it matters which."""
