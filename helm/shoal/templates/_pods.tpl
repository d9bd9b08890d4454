{{/* Parts of pods that all pods of the chart share. */}}

{{- define "shoal.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile: {type: RuntimeDefault}
{{- end -}}

{{- define "shoal.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end -}}

{{- define "shoal.pullSecrets" -}}
{{- with concat .Values.imagePullSecrets (dig "imagePullSecrets" list (.Values.global | default dict)) }}
imagePullSecrets:
{{- range . }}
  - name: {{ kindIs "string" . | ternary . (get (kindIs "map" . | ternary . dict) "name") | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Versions of the secrets that the controllers' variables are read from and the chart has not made: where somebody has
     changed one, the next upgrade replaces the controllers. */}}
{{- define "shoal.givenSecrets" -}}
{{- range $what, $name := dict "token" .Values.token.existingSecret "etcd-password" .Values.etcd.external.passwordSecret }}
{{- if $name }}
{{- with lookup "v1" "Secret" $.Release.Namespace $name }}
shoal.dev/version-of-{{ $what }}: {{ .metadata.resourceVersion | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Where pods of one kind run: dict "root" . "component" NAME "placement" VALUES */}}
{{- define "shoal.placement" -}}
{{- with .placement.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .placement.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .placement.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .placement.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml .placement.topologySpreadConstraints | nindent 2 }}
{{- else if not .placement.affinity }}
topologySpreadConstraints:
{{- range $topology := list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - topologyKey: {{ $topology }}
    maxSkew: 1
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels: {{- include "shoal.selector" $ | nindent 8 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Defaults of jobs as the controllers read them; nothing where there are none. */}}
{{- define "shoal.defaults" -}}
{{- $found := dict -}}
{{- range $key, $value := .Values.defaults -}}
{{- with $value -}}
{{- $found = set $found $key . -}}
{{- end -}}
{{- end -}}
{{- with $found -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{/* Where the store is, and as whom it is asked. */}}
{{- define "shoal.storeEnv" -}}
{{- $external := .Values.etcd.external -}}
- name: SHOAL_STORE
  value: {{ include "shoal.store" . }}
{{- if include "shoal.etcdTls" . }}
- name: SHOAL_ETCD_CA
  value: /etcd-tls/ca.crt
{{- end }}
{{- if or (include "shoal.ownEtcdTls" .) $external.clientCertificate }}
- name: SHOAL_ETCD_CERTIFICATE
  value: /etcd-tls/tls.crt
- name: SHOAL_ETCD_KEY
  value: /etcd-tls/tls.key
{{- end }}
{{- with $external.passwordSecret }}
- name: SHOAL_ETCD_PASSWORD
  valueFrom: {secretKeyRef: {name: {{ . | quote }}, key: password}}
{{- end }}
{{- end -}}

{{/* The volume with the certificates of etcd, for `/etcd-tls`; nothing where it speaks no TLS. */}}
{{- define "shoal.etcdTls" -}}
{{- $secret := .Values.etcd.external.tlsSecret -}}
{{- if or (include "shoal.ownEtcdTls" .) $secret -}}
- name: etcd-tls
  secret: {secretName: {{ $secret | default (printf "%s-etcd-tls" (include "shoal.fullname" .)) | quote }}, defaultMode: 0440}
{{- end -}}
{{- end -}}

{{/* What a pod needs to use REST as a client: where it is, the token and the authority. */}}
{{- define "shoal.clientEnv" -}}
- name: SHOAL_URL
  value: {{ include "shoal.url" . }}
- name: SHOAL_TOKEN
  valueFrom: {secretKeyRef: {name: {{ include "shoal.tokenSecret" . | quote }}, key: token}}
{{- if ne .Values.tls.source "none" }}
- name: SHOAL_CA
  value: /tls/ca.crt
{{- end }}
{{- end -}}

{{- define "shoal.clientMounts" -}}
- {name: scripts, mountPath: /scripts, readOnly: true}
- {name: tmp, mountPath: /tmp}
{{- if ne .Values.tls.source "none" }}
- {name: authority, mountPath: /tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "shoal.clientVolumes" -}}
- name: scripts
  configMap: {name: {{ include "shoal.fullname" . }}-scripts}
- name: tmp
  emptyDir: {sizeLimit: 64Mi}
{{- if ne .Values.tls.source "none" }}
- name: authority
  secret: {secretName: {{ include "shoal.tlsSecret" . | quote }}, items: [{key: ca.crt, path: ca.crt}]}
{{- end }}
{{- end -}}

{{- define "shoal.clientResources" -}}
requests: {cpu: 50m, memory: 128Mi}
limits: {cpu: 500m, memory: 256Mi}
{{- end -}}
