"""What processes of one machine share: who is there, memory, locks, accounts."""
