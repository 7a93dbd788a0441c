//! Claims whose claimants may go away before they are answered.

use std::sync::mpsc::Sender;

use tokio::sync::oneshot;

use super::{
    super::{KeyHash, OwnerId, StoreError, life::Command},
    committer::{Queued, Request},
    gone,
    record::Lookup,
};

/// A claim that is given back unless its claimant receives it.
pub(super) struct PendingClaim<'a> {
    queue: &'a Sender<Queued>,
    key: KeyHash,
    owner: OwnerId,
    answered: Option<oneshot::Receiver<Result<Lookup, StoreError>>>,
    owned: bool,
}

impl<'a> PendingClaim<'a> {
    /// A claim that was queued, and where its answer comes.
    pub(super) fn new(
        queue: &'a Sender<Queued>,
        key: KeyHash,
        owner: OwnerId,
        answered: oneshot::Receiver<Result<Lookup, StoreError>>,
    ) -> Self {
        Self {
            queue,
            key,
            owner,
            answered: Some(answered),
            owned: false,
        }
    }

    /// Its claimant has it.
    pub(super) fn received(mut self) {
        self.owned = false;
    }

    pub(super) async fn answer(&mut self) -> Result<Lookup, StoreError> {
        let Some(answered) = &mut self.answered else {
            return Err(gone());
        };
        let lookup = answered.await.map_err(|_| gone())?;
        self.answered = None;
        self.owned = matches!(lookup, Ok(Lookup::Open(_)));
        lookup
    }
}

impl Drop for PendingClaim<'_> {
    fn drop(&mut self) {
        if let Some(mut answered) = self.answered.take() {
            // From here on the committer sees that nobody receives it.
            answered.close();
            self.owned = matches!(answered.try_recv(), Ok(Ok(Lookup::Open(_))));
        }
        if self.owned {
            let (answer, _) = oneshot::channel();
            let command = Command::Release { owner: self.owner };
            // If the thread is gone, so is the ownership.
            let _ = self.queue.send(Queued {
                request: Request::Write(self.key, command, answer),
                bytes: 0,
                room: None,
            });
        }
    }
}
