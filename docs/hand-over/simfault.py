import sys, time
from tests.support.simulated_ring import *
n, c, what = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
base=Case(n,c); T=base.alone_seconds
rate=float(sys.argv[4]) if len(sys.argv)>4 else 1.25e9
import dataclasses
k=max(1,n//100)
kw=dict(rate=rate,mirror_rate=rate)
T=c*CHUNK_SIZE/rate
if 'k' in what: kw['kills']={i:T/2 for i in range(k)}
if 's' in what: kw['slow']={i:20.0 for i in range(k,2*k)}
if 'l' in what: kw['starts']={i:T*(i%10)/10 for i in range(2*k,2*k+n//10)}
if 'j' in what: kw['joins']={i:T/2 for i in range(n-max(1,n//20),n)}
r=Ring(Case(n,c,**kw)); t=time.perf_counter(); r.run()
f=sorted((x.finished_at or -1, x.number) for x in r.survivors)
quick=[x for x in f if x[1] not in r.case.slow]
print(n,c,what,"origin",round(r.origin_ratio,4),"last/alone",round(max(quick)[0]/T,3),"slowest",round(max(f)[0]/T,2),"unfinished",sum(x[0]<0 for x in f),"hedged",max(x.hedges.used/x.hedges.limit for x in r.survivors),round(time.perf_counter()-t,1))
