"""Layer 3: below the entries the only importers of distributed.

May import layers 2, 1 and 0 and ``distributed``.

The path of a push, from a trainer to a shard that another process may own:

1. `Trainer.push` checks the arrays; `Session.deliver` gives the step its number.
2. `SplitRoute` says which shards are local. These take the step at once, in the trainer's
   thread: `Session._step_local`, `SplitRoute.try_step`, `HostedShard.try_step`.
3. Of the others `SocketCarrier` sends one frame to each host. There a thread of
   `SocketServer` takes it: `Connection.go_on`, `SocketCalls.begin`, `HostTemplate.begin`,
   and for each shard `HostedShard.try_step`.
4. The rest goes by message, in the event loop: `RemoteShards.call`, and at the host
   `ShardHost.handle_call`, with a ticket for each shard: `HostedShard.serve`,
   `Shard.submit`. (`thread_call` has the life of such a call at its caller.)
5. `Shard.step` or `Shard.submit` has `Round.take_step` keep the arrays until all ranks are
   in, or `Pushes.apply` apply them; a `Publication` flips. Versions go back the same way.
6. Where the owner of a shard has died, `RemoteShards.relocate` asks the directory
   (`Directory.on_locate`), which answers once a `Move` has installed a new one.

Words of the code, in a line each; ``docs/glossary.md`` has those of users as well:

========== ===========================================================================
away       of a shard: it has no owner, but evidence of its memory; calls wait
block      a file of shared memory, with a segment or a mailbox in it
carrier    a way to carry a call: local shards, sockets, messages
cut        a moment at which all shards have the same steps; holds tickets back
deputy     a process that acts for a shard of another one, on its memory, under its lock
fence      ends a run on all shards at the same round
flip       number of the publication in force; to store it makes an update visible
floor      all steps of a producer below this number were answered or given up
frame      a call or an answer on a socket: head and body
gate       word of a segment by which its owner says what deputies may do
generation number of a shard's owners so far; a step for a former one is refused
host       `ShardHost`: what a worker has of daskps; serves its shards
hosted     `HostedShard`: a shard with its mutex and inbox, in its owner or a deputy
look       to find without changing: for memory (adoption), for NaN (checks), for rows
lost       of a shard: no evidence of its memory for too long; calls raise
mailbox    memory for what the ranks bring to the open round of a shard
owner      of a shard: its worker; of a ticket: the call to tell; of a file: its process
parked     of a ticket or call: it waits as data, without a thread
piece      what a shard has of one parameter or table
position   number of a piece in its shard
record     what a segment says of itself at a flip: versions, clocks, sides; there are two
route      which shards a call meets, and with what of its arrays
round      one step of all ranks under BSP; each shard has one open
segment    the memory of a shard
serving    `ReachableShards` of one host: its own, or mapped into this process
side       one of two buffers of a piece
slice      what a route gives a shard of an array; in a mailbox room for one sum
template   what all calls along a route to one host share; sent once for each socket
tick       ends a trainer's step: its clock rises by one
ticket     a step on its way through a shard that may have to wait
turn       of threads: to be alone at a shard; of a mailbox: which table is in force
========== ===========================================================================
"""
