use super::*;
use crate::{
    ids::{EngineRequestId, Target},
    store::Fingerprint,
};

const HOUR: Duration = Duration::from_secs(3600);
const OWNER: OwnerId = OwnerId(1);

async fn claim(store: &MemoryStore, key: KeyHash) {
    let request = ClaimRequest {
        key,
        tenant: Tenant::default(),
        fingerprint: Fingerprint([0; 32]),
        num_samples: 1,
        owner: OWNER,
    };
    let claim = store.claim(request).await;
    assert!(matches!(claim, Ok(Claim::Claimed(_))), "{claim:?}");
    let attempt = AttemptRecord {
        number: 1,
        id: EngineRequestId::mint(),
        target: Target {
            replica: ReplicaId::new("r"),
            incarnation: Incarnation(1),
            rank: 0,
        },
        url: String::new(),
        binds: Some(7),
    };
    store.dispatch(key, OWNER, 0, attempt).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn keys_expire_unless_somebody_owns_them() {
    let store = MemoryStore::default();
    let [left, owned] = [KeyHash([1; 32]), KeyHash([2; 32])];
    claim(&store, left).await;
    claim(&store, owned).await;
    store.release(left, OWNER).await.unwrap();
    tokio::time::advance(23 * HOUR).await;
    assert!(store.read(left).await.unwrap().is_some());
    tokio::time::advance(2 * HOUR).await;
    assert!(store.read(left).await.unwrap().is_none());
    let read = store.read(owned).await.unwrap();
    assert!(matches!(read, Some(Claim::Running { owner: OWNER })));
    store.release(owned, OWNER).await.unwrap();
    tokio::time::advance(25 * HOUR).await;
    assert!(store.read(owned).await.unwrap().is_none());
    assert!(store.lock().used.is_empty() && store.lock().by_age.is_empty());
}
