"""What reports and commands share: tables, files of users, versions."""
