#!/bin/bash
# up.sh DIR BIN : one node of Kubernetes 1.20 in the namespaces of rig.sh: etcd, API server, controllers, scheduler, and a kubelet with containerd.
# Returns once the node is Ready. KUBECONFIG is DIR/kubeconfig, logs are in DIR/log, images are DIR/images/*.tar. The directory of the kubelet is DIR/k.
set -eu
dir=$1; bin=$2; ip=10.77.0.1
mount --make-rshared /
mkdir -p "$dir"/{etcd,pki,log,cni,ipam,containerd,crun,k}
start() { local name=$1; shift; "$@" >"$dir/log/$name" 2>&1 & }
openssl genrsa -out "$dir/pki/sa.key" 2048 2>/dev/null
openssl req -x509 -newkey rsa:2048 -nodes -days 30 -keyout "$dir/pki/api.key" -out "$dir/pki/api.crt" -subj /CN=kube-apiserver \
    -addext "subjectAltName=IP:$ip,IP:127.0.0.1,IP:10.96.0.1,DNS:kubernetes.default.svc" 2>/dev/null
token=$(openssl rand -hex 16); printf '%s,admin,admin,"system:masters"\n' "$token" > "$dir/pki/tokens.csv"
cat > "$dir/kubeconfig" <<C
apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: "https://$ip:6443", certificate-authority: $dir/pki/api.crt}}]
users: [{name: admin, user: {token: $token}}]
contexts: [{name: c, context: {cluster: c, user: admin}}]
current-context: c
C
export KUBECONFIG=$dir/kubeconfig
cat > "$dir/cni/10-bridge.conflist" <<C
{"cniVersion": "0.4.0", "name": "rig", "plugins": [
  {"type": "bridge", "bridge": "cni0", "isGateway": true, "ipMasq": true, "hairpinMode": true,
   "ipam": {"type": "host-local", "dataDir": "$dir/ipam", "ranges": [[{"subnet": "10.78.0.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
C
cat > "$dir/containerd.toml" <<C
version = 2
root = "$dir/containerd"
state = "$dir/crun"
[grpc]
  address = "$dir/containerd.sock"
[ttrpc]
  address = "$dir/containerd.sock.ttrpc"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "localhost/busybox:1"
  restrict_oom_score_adj = true  # root has no CAP_SYS_RESOURCE everywhere
  stream_server_port = "0"
  [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
    runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "$dir/cni"
C
sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1 2>/dev/null || true
start etcd etcd --data-dir "$dir/etcd" --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
start apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --bind-address=$ip --advertise-address=$ip --secure-port=6443 --insecure-port=0 \
    --tls-cert-file="$dir/pki/api.crt" --tls-private-key-file="$dir/pki/api.key" --token-auth-file="$dir/pki/tokens.csv" --authorization-mode=RBAC \
    --service-account-key-file="$dir/pki/sa.key" --service-account-signing-key-file="$dir/pki/sa.key" --service-account-issuer=https://kubernetes.default.svc \
    --feature-gates=CSIServiceAccountToken=true --api-audiences=bdn,https://kubernetes.default.svc --service-cluster-ip-range=10.96.0.0/24 --allow-privileged=true --kubelet-preferred-address-types=InternalIP
start containerd containerd -c "$dir/containerd.toml" -l warn
for _ in $(seq 240); do [ "$(curl -sk -m 2 -H "Authorization: Bearer $token" https://$ip:6443/readyz)" = ok ] && break; sleep .25; done
start controllers "$bin/kube-controller-manager" --kubeconfig="$KUBECONFIG" --service-account-private-key-file="$dir/pki/sa.key" --root-ca-file="$dir/pki/api.crt" \
    --use-service-account-credentials --leader-elect=false --bind-address=127.0.0.1
start scheduler "$bin/kube-scheduler" --kubeconfig="$KUBECONFIG" --leader-elect=false --bind-address=127.0.0.1
for image in "$dir"/images/*.tar; do ctr -a "$dir/containerd.sock" -n k8s.io images import "$image" >/dev/null; done
start kubelet "$bin/kubelet" --kubeconfig="$KUBECONFIG" --hostname-override=node1 --node-ip=$ip --root-dir="$dir/k" \
    --container-runtime=remote --container-runtime-endpoint="unix://$dir/containerd.sock" --cgroup-driver=cgroupfs --cgroups-per-qos=false --enforce-node-allocatable= \
    --feature-gates=CSIServiceAccountToken=true --fail-swap-on=false --authentication-token-webhook=false --anonymous-auth=true --authorization-mode=AlwaysAllow --address=$ip \
    --volume-plugin-dir="$dir/volume-plugins" --read-only-port=0 --oom-score-adj=0 --eviction-hard= --image-gc-high-threshold=100
for _ in $(seq 240); do "$bin/kubectl" get node node1 2>/dev/null | grep -q ' Ready' && break; sleep .25; done
for _ in $(seq 240); do "$bin/kubectl" get serviceaccount default >/dev/null 2>&1 && exit; sleep .25; done
exit 1
