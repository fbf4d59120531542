import sys, time
from tests.support.simulated_ring import *
from tests.support.simulated_links import *
n, c = int(sys.argv[1]), int(sys.argv[2])
t=time.perf_counter()
r=Ring(Case(n,c), FluidLinks if len(sys.argv)>3 else QueuedLinks); b=time.perf_counter()-t
r.run()
f=[x.finished_at for x in r.nodes]
print(n,c,"origin",r.origin_ratio,"last/alone",max(f)/r.case.alone_seconds,"first",min(f)/r.case.alone_seconds,"build",round(b,1),"all",round(time.perf_counter()-t,1))
