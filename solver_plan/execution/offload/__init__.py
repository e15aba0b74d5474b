"""Carries out offload plans: AdamW over a device and its host.

optimizer   what a training script sees           layers      the plan's layers bound to parameters, and cut
steps       the training loop's steps             state       master weights and moments of a layer
saved_state AdamW's form of the state             adamw       the update
engine      all layers' updates                   clipping    the norm, and whether to speculate on it
passes      one update: done, undone, repeated    lanes       threads, and the order of what they do
host_updates, streamed_updates   two kinds of it  device      streams and pinned memory, or the CPU in their place
rooms, arena  memory that the plan needs, and pieces of it
training    `solver-plan run`                     hooks       that a model may be copied and saved with
"""
