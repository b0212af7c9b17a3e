#!/usr/bin/env python3
"""Prints the event files of tests/io/tensorboard_test.cpp, as TensorBoard's own classes write it, in hexadecimal.

Needs the packages tensorboard and numpy.
"""

import io

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
from tensorboard.summary.writer.record_writer import RecordWriter


def event(time, step, value):
    return Event(wall_time=time, step=step, summary=Summary(value=[value]))


def text(tag, value):
    shape = TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)])
    tensor = TensorProto(dtype="DT_STRING", tensor_shape=shape, string_val=[value.encode()])
    plugin = SummaryMetadata.PluginData(plugin_name="text")
    return Summary.Value(tag=tag, tensor=tensor, metadata=SummaryMetadata(plugin_data=plugin))


def histogram(tag, values):
    counts, bounds = np.histogram(values, bins=30 if min(values) < max(values) else 1)
    if min(values) == max(values):
        bounds = [0, max(values)]
    histo = HistogramProto(min=min(values), max=max(values), num=len(values), sum=sum(values),
                           sum_squares=sum(v * v for v in values), bucket_limit=list(bounds[1:]), bucket=list(counts))
    return Summary.Value(tag=tag, histo=histo)


events = [
    Event(wall_time=1000.5, file_version="brain.Event:2"),
    event(1001.5, 0, Summary.Value(tag="loss/train", simple_value=2.5)),
    event(1002.5, 1, Summary.Value(tag="loss/train", simple_value=float("nan"))),
    event(1003.5, 300, Summary.Value(tag="größe", simple_value=0)),
    event(1004.5, -1, text("note", "**bold** → ok")),
    event(1005.5, 7, histogram("ramp", [float(i) for i in range(31)])),
    event(1006.5, 8, histogram("constant", [4.0, 4.0])),
    event(1007.5, 9, Summary.Value(tag="none", histo=HistogramProto(bucket_limit=[0], bucket=[0]))),
]
resumed = [
    Event(wall_time=2001.5, file_version="brain.Event:2"),
    Event(wall_time=2002.5, step=7, session_log=SessionLog(status=SessionLog.START)),
]
for name, list_of_events in [("kExpected", events), ("kExpectedOfResumed", resumed)]:
    file = io.BytesIO()
    writer = RecordWriter(file)
    for e in list_of_events:
        writer.write(e.SerializeToString(deterministic=True))
    data = file.getvalue()
    print(name)
    for at in range(0, len(data), 48):
        print(f'    "{data[at:at + 48].hex()}"')
