#!/bin/bash
# up.sh DIR BIN : what a cluster of Kubernetes 1.20 has beside its nodes, in the namespaces of rig.sh: etcd, API server, controllers, scheduler, and a
# proxy, for nodes share a network. Returns once the API server is ready. KUBECONFIG is DIR/kubeconfig, logs are in DIR/log. node.sh starts a node.
set -eu
dir=$1; bin=$2; ip=10.77.0.1
mkdir -p "$dir"/{etcd,pki,log}
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
ip route add 10.96.0.0/24 dev rig0  # of Services, for programs outside pods
export KUBECONFIG=$dir/kubeconfig
sysctl -qw net.ipv4.ip_forward=1 net.bridge.bridge-nf-call-iptables=1 2>/dev/null || true
start etcd etcd --data-dir "$dir/etcd" --listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 --listen-peer-urls http://127.0.0.1:2380
start apiserver "$bin/kube-apiserver" --etcd-servers=http://127.0.0.1:2379 --bind-address=$ip --advertise-address=$ip --secure-port=6443 --insecure-port=0 \
    --tls-cert-file="$dir/pki/api.crt" --tls-private-key-file="$dir/pki/api.key" --token-auth-file="$dir/pki/tokens.csv" --authorization-mode=RBAC \
    --service-account-key-file="$dir/pki/sa.key" --service-account-signing-key-file="$dir/pki/sa.key" --service-account-issuer=https://kubernetes.default.svc \
    --feature-gates=CSIServiceAccountToken=true --api-audiences=bdn,https://kubernetes.default.svc --service-cluster-ip-range=10.96.0.0/24 --allow-privileged=true --kubelet-preferred-address-types=InternalIP
for _ in $(seq 240); do [ "$(curl -sk -m 2 -H "Authorization: Bearer $token" https://$ip:6443/readyz)" = ok ] && break; sleep .25; done
start controllers "$bin/kube-controller-manager" --kubeconfig="$KUBECONFIG" --service-account-private-key-file="$dir/pki/sa.key" --root-ca-file="$dir/pki/api.crt" \
    --use-service-account-credentials --leader-elect=false --bind-address=127.0.0.1
start scheduler "$bin/kube-scheduler" --kubeconfig="$KUBECONFIG" --leader-elect=false --bind-address=127.0.0.1
start proxy "$bin/kube-proxy" --kubeconfig="$KUBECONFIG" --hostname-override=node1 --cluster-cidr=10.78.0.0/24 --conntrack-max-per-core=0 --metrics-bind-address=127.0.0.1:10249
