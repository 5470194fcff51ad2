"""Things that processes of one machine share: membership, memory, locks, accounts."""
