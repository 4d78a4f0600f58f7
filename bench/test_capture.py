"""How long it takes to record the decode step of the ``tiny`` shape."""

import pytest
from conftest import CONTEXT, recorders

from graphcap import Settings
from graphcap.decode.decoder import Decoder


@pytest.mark.parametrize("verify", ["off", "capture"])
@pytest.mark.parametrize("recorder", recorders())
def test_capture(benchmark, weights, kernels, recorder, verify):
    def setup():
        decoder = Decoder(
            weights,
            kernels,
            max_batch=8,
            max_context=CONTEXT,
            settings=Settings(recorder=recorder, verify=verify),
        )
        return (decoder,), {}

    def capture(decoder):
        report = decoder.manager.capture()
        benchmark.extra_info["bucket_ms"] = {b.size: b.capture_ms for b in report.buckets}
        decoder.close()

    benchmark.pedantic(capture, setup=setup, rounds=3)
