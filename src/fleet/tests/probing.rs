//! Ports that are asked, under paused time: where nothing is left to do but to
//! wait, time jumps.

use tokio::net::{TcpSocket, TcpStream};

use super::*;

/// A port at which connections are neither taken nor refused: its queue is full.
async fn swallowing() -> (tokio::net::TcpListener, Vec<TcpStream>) {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut queue = Vec::new();
    loop {
        let next = TcpStream::connect(address);
        match tokio::time::timeout(Duration::from_secs(1), next).await {
            Ok(taken) => queue.push(taken.unwrap()),
            Err(_) => return (listener, queue),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_slow_probe_holds_up_no_registration_and_condemns_nobody() {
    let (listener, _queue) = swallowing().await;
    let fleet = fleet();
    let mut slow = facts("a", "boot");
    slow.url = format!("http://{}", listener.local_addr().unwrap()).into();
    for rank in &mut slow.ranks {
        rank.url = Arc::clone(&slow.url);
    }
    let me = fleet.register(slow).await.unwrap().incarnation;
    let at = target(&fleet, "a", 0);
    let begun = Instant::now();
    fleet.unreachable(&at);
    let probing = |fleet: &Fleet| fleet.lock().current(&at).is_some_and(|e| e.probing);
    tokio::task::yield_now().await;
    assert!(probing(&fleet));
    let other = fleet.register(facts("b", "boot")).await.unwrap();
    fleet.beat(beat("a", me, 1)).unwrap();
    fleet.beat(beat("b", other.incarnation, 1)).unwrap();
    assert_eq!(fleet.snapshot().ranks.len(), 4);
    assert!(probing(&fleet), "all of that while the probe waits");
    assert_eq!(Instant::now(), begun);
    while probing(&fleet) {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(begun.elapsed() >= Duration::from_secs(1));
    assert_eq!(fleet.snapshot().ranks.len(), 4);
}
