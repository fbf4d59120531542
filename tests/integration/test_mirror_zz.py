import pytest, time
from tests.doubles.faults import stall
from tests.doubles.content import GeneratedContent
from tests.support.mirror_service import *
pytest_plugins = ("tests.support.mirror_fixtures",)
@pytest.mark.parametrize("n",[0,1,2])
async def test_x(upstreams, hub, tmp_path,n):
    hub.repo("org/model").commit({"config.json": b"{}", "sub/model.safetensors": GeneratedContent(3*8*1024*1024+5)})
    hub.fail(stall(at=10), origin="cdn", skip=2, times=None)
    async with mirror_under_test(tmp_path) as m:
        await m.begin(source("hf://org/model"))
        await until(lambda: hub.log.count(origin="cdn")>n)
        t=time.time()
    print("CLOSE", time.time()-t)
