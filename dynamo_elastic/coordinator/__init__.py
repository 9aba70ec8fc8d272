"""Control plane: etcd behind a Store, leases, leadership, one durable scale operation."""
