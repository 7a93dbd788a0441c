//! An operator who looks at the fleet all the time.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex},
    time::Duration,
};

use berth::proto::{
    ListReplicasRequest, Replica, ReplicaHealth, fleet_service_client::FleetServiceClient,
};
use tokio::task::JoinHandle;
use tonic::transport::Channel;

use crate::eventually;

pub(crate) fn operator(url: &str) -> FleetServiceClient<Channel> {
    let channel = Channel::from_shared(url.to_owned()).unwrap();
    FleetServiceClient::new(channel.connect_lazy())
}

/// The fleet as it is; nothing while nobody answers.
pub(crate) async fn replicas(operator: &mut FleetServiceClient<Channel>) -> Vec<Replica> {
    let asked = operator.list_replicas(ListReplicasRequest::default());
    match tokio::time::timeout(Duration::from_secs(10), asked).await {
        Ok(Ok(listed)) => listed.into_inner().replicas,
        Ok(Err(_)) | Err(_) => Vec::new(),
    }
}

/// Waits until so many replicas are healthy.
pub(crate) async fn healthy(url: &str, count: usize) {
    let mut operator = operator(url);
    eventually("replicas are healthy", async || {
        let replicas = replicas(&mut operator).await;
        let well = replicas
            .iter()
            .filter(|r| r.health() == ReplicaHealth::Healthy);
        well.count() == count
    })
    .await;
}

/// What was seen of one replica.
#[derive(Clone, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) incarnations: BTreeSet<u64>,
    /// Those that were dead.
    pub(crate) dead: BTreeSet<u64>,
    /// It was suspect.
    pub(crate) suspect: bool,
}

pub(crate) struct Watcher {
    seen: Arc<Mutex<BTreeMap<String, Seen>>>,
    task: JoinHandle<()>,
}

impl Watcher {
    pub(crate) fn start(url: &str) -> Self {
        let seen = Arc::<Mutex<BTreeMap<String, Seen>>>::default();
        let (noted, mut operator) = (Arc::clone(&seen), operator(url));
        let task = tokio::spawn(async move {
            loop {
                for replica in replicas(&mut operator).await {
                    let mut noted = noted.lock().unwrap();
                    let seen = noted.entry(replica.replica_id.clone()).or_default();
                    seen.incarnations.insert(replica.incarnation);
                    match replica.health() {
                        ReplicaHealth::Dead => {
                            seen.dead.insert(replica.incarnation);
                        }
                        ReplicaHealth::Suspect => seen.suspect = true,
                        _ => {}
                    }
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        Self { seen, task }
    }

    pub(crate) fn seen(&self) -> BTreeMap<String, Seen> {
        self.seen.lock().unwrap().clone()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}
