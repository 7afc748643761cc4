"""Streams: samples in a fixed order that several processes and workers divide, and that resume at any sample."""

from __future__ import annotations

from dovetail.data.streams.indexed import IndexedStream
from dovetail.data.streams.loader import StreamLoader
from dovetail.data.streams.protocol import Stream
from dovetail.data.streams.recognition import as_stream, as_stream_loader
from dovetail.data.streams.sharded import OpenShard, ShardedStream

__all__ = ["IndexedStream", "OpenShard", "ShardedStream", "Stream", "StreamLoader", "as_stream", "as_stream_loader"]
